"""What prompts hold besides text: to the scheduler and the cache, images and audio are alike.

Each has a ``start`` and ``num_tokens`` in the prompt and a ``digest`` of its contents.
"""

from __future__ import annotations

from engine.audio.types import AudioClip
from engine.images.types import Image

Media = Image | AudioClip
