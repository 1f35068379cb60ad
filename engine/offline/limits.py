"""Which numbers the arguments of the offline ``LLM`` may be: the server's limits of these names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
RankCount = Annotated[int, Meta(ge=1, le=64)]
BlockSize = Annotated[int, Meta(ge=1, le=1024)]
DraftCount = Annotated[int, Meta(ge=1, le=32)]
PartCount = Annotated[int, Meta(ge=0, le=1024)]  # images, clips or videos in a prompt
ImageTokens = Annotated[int, Meta(ge=4)]
Duration = Annotated[int, Meta(ge=1, le=36_000)]  # seconds
FrameCount = Annotated[int, Meta(ge=1, le=4096)]
FrameRate = Annotated[float, Meta(gt=0, le=60)]  # frames per second
