"""`get_global_ranks`."""

from smckpt.meeting.group import get_global_ranks

__all__ = ["get_global_ranks"]
