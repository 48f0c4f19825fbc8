"""Container images of a job, for Kubernetes and for SLURM with containers.

- `engine`: the build context (a Dockerfile, the committed code, the runner), and its build by docker, podman or buildah
"""
