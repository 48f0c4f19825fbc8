"""The sections of the kit. `measure(setting, ...)` of each yields figures as it sees them, in the order of their worth.

A section that fails raises; what it has yielded stays.
"""
