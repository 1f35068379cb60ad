"""Which sequences compute which tokens, step by step. No torch, no clock, no I/O."""

from engine.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
