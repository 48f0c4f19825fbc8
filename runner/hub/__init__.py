"""An export on the Hugging Face Hub, or a server that speaks as it does: what is told of it, and its upload.

Never in a training loop: asked for by `python -m runner export --push`, which needs the extra `hub`.

- `card` the README.md of a repository, from the spec and the curves
- `repository` a repository on the Hub, found and pushed to
"""
