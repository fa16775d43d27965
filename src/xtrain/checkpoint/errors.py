"""What goes wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or of another model."""


class CheckpointReplaced(CheckpointError):
    """A checkpoint that was deleted or replaced while it was read: load again."""
