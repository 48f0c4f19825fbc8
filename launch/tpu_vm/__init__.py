"""The job on TPU VMs of Google Cloud: one queued resource, one supervised process group a host.

- `gcloud`: TPU VMs as gcloud sees them: the commands of one queued resource, how they are run, and what their a
- `host`: What is run on the hosts of a TPU VM: the programs beside this file, which know neither gcloud nor e
- `job`: One job on one queued resource, from the request for machines to their end
- `engine`: The job on TPU VMs of Google Cloud: a queued resource, the committed code on all of its hosts, and t
"""
