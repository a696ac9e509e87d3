"""The error of everything that can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A model cannot be read. The message names the file, and the tensor or key where there is one."""
