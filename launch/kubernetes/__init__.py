"""The job as a JobSet on Kubernetes, with one child Job per slice and one pod per host.

- `engine`: the manifest (nodes, pods, answers to exit codes, the rules of an API server) and its submission by kubectl
"""
