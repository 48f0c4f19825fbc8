"""Steps of a run looked at again, beside the run, which is only read.

- `scratch`: the job of a run in a scratch directory, at its newest checkpoint before a step
- `origin`: examples of a step: their sources and documents, and what they hold
- `losses`: losses and gradients of single examples
- `activations`: results of the modules of a step, by layer
- `leaves`: parameters, gradients, updates and activations of a step by leaf, module and layer
- `picture`: page with heat maps and histograms of an inspected step
- `replay`: a step computed again, and compared with what the run recorded
- `against`: steps of two runs computed again, and the first difference between them
- `side`: the same in processes of their own, each with its own code
- `explain`: the examples of a step, the cost of each, and other changes at that step
- `judge`: statistics of a paired trial
- `trial`: a change tried on the next steps of a run
- `bundle`: an archive from which somebody else can run the job again, and check its results
"""
