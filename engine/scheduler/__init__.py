"""Decides which sequences compute which tokens in each step. No torch, no clock, no I/O."""

from engine.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
