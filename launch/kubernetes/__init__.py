"""The job as a JobSet on Kubernetes: one child Job a slice, one pod a host.

- `jobset`: The pods of a JobSet: the nodes they need, their container, its variables and volumes
- `engine`: The job as a JobSet on Kubernetes: one child Job a slice, one pod a host
"""
