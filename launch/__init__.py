"""How a spec reaches an engine: `python -m launch ENGINE SPEC`. Runs the runner's command; never imported by it."""
