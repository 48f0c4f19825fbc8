"""The job as a JobSet on Kubernetes: one child Job a slice, one pod a host.

- `admission`  what an API server would refuse
- `pod`     the nodes that pods need, their container, its variables and volumes
- `jobset`  the manifest, and what follows the end of a pod
- `engine`  the command line, and kubectl
"""
