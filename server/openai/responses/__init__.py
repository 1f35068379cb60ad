"""The Responses API: /v1/responses, over the same conversations as chat.

    body ──► inputs ──► translate ──► Conversation ──► parts ──► assembly ──► typed events
                           ▲                                        │
                    store: earlier items                            ▼
                                                     Response ──► store

Shapes that clients send are in ``inputs``, those they are sent in ``items``, ``outputs`` and
``events``. ``call`` answers a request while its client waits, ``background`` without one.
"""
