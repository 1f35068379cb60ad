"""The part of ``server/settings.py`` for images, videos and audio in prompts."""

from __future__ import annotations

from server.setting import SettingsPart, setting

MEDIA = "Images, video and audio"


class MediaSettings(SettingsPart):
    """What prompts may hold besides text; see docs/images.md, docs/video.md and docs/audio.md."""

    max_images: int = setting(
        16,
        MEDIA,
        "Most images in one prompt, for models that read images. 0 refuses images and does not "
        "load the image encoder.",
        ge=0,
        le=1024,
    )
    max_image_tokens: int | None = setting(
        None,
        MEDIA,
        "Most tokens per image; larger images are scaled down. Default: the model's own limit, "
        "on a CPU at most 1,024 because encoding takes seconds.",
        ge=4,
    )
    max_audio_clips: int = setting(
        16,
        MEDIA,
        "Most audio clips in one prompt, for models that hear. 0 refuses audio and does not load "
        "the audio encoder.",
        ge=0,
        le=1024,
    )
    max_audio_s: int = setting(
        1800, MEDIA, "Most seconds of an audio clip. A model may hear less.", ge=1, le=36_000
    )
    max_videos: int = setting(
        4,
        MEDIA,
        "Most videos in one prompt, for models that read videos. 0 refuses videos.",
        ge=0,
        le=1024,
    )
    max_video_s: int = setting(1800, MEDIA, "Most seconds of a video.", ge=1, le=36_000)
    max_video_frames: int | None = setting(
        None,
        MEDIA,
        "Most frames that are shown of a video. Default: the model's own limit, on a CPU at most "
        "64.",
        ge=1,
        le=4096,
    )
    max_video_tokens: int | None = setting(
        None,
        MEDIA,
        "Most tokens per video; frames of larger ones are scaled down. Default: 16,384, on a CPU "
        "2,048.",
        ge=4,
    )
    video_fps: float | None = setting(
        None,
        MEDIA,
        "Frames per second that are shown of a video, unless a request says otherwise. Default: "
        "the model's own.",
        gt=0,
        le=60,
    )
