"""The job on TPU VMs of Google Cloud: one queued resource, one supervised process group a host.

- `source`    the commit that is shipped
- `gcloud`    the commands of one queued resource, how they are run, what their answers mean
- `log_tail`  a log on another machine, shown on this terminal
- `host`      the programs that are run on the hosts, `*.sh`, and what they answer
- `job`       one job from the request for machines to their end
- `engine`    the command line
"""
