"""The job on TPU VMs of Google Cloud: one queued resource, one supervised process group per host.

- `gcloud`: commands of a queued resource, programs that run on its hosts, and how their answers are read
- `engine`: from command line and spec to the machines and the code to ship, and one job to its end
"""
