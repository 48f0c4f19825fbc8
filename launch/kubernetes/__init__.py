"""The job as a JobSet on Kubernetes, with one child Job per slice and one pod per host.

- `jobset`: the manifest: nodes, pods, answers to exit codes, and the rules of an API server
- `engine`: the submission of the manifest with kubectl
"""
