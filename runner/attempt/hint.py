"""What one wants to know when a run has ended: lines for a person."""


def lines_at_the_end(directory: str, step: int) -> list[str]:
    """Where the files are, what a kill does, what the fingerprint is for. To be printed after `done at step ...`."""
    return [
        f"files: {directory} (result.json, spec.yaml, checkpoints/{step} ...)",
        "run the same command again: now it does nothing; after a kill, at any moment, it goes on from the last save",
        "fingerprint: of the state's every bit; killed or not, the same spec on the same hardware ends in the same one",
    ]
