"""The job on TPU VMs of Google Cloud: one queued resource, one supervised process group per host.

- `gcloud`: commands of a queued resource, how they are run, and how their answers are read
- `host`: programs that run on the hosts, their statuses and logs
- `job`: one job on one queued resource, from the request for machines to their end
- `engine`: from command line and spec to the machines to request and the code to ship
"""
