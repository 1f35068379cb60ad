"""The Responses API: /v1/responses, built on the same conversations as chat.

    body ──► inputs ──► translate ──► Conversation ──► parts ──► assembly ──► typed events
                           ▲                                        │
                    store: earlier items                            ▼
                                                     Response ──► store

The shapes of requests are in ``inputs``, those of responses in ``items``, ``outputs`` and
``events``. ``call`` answers a request while its client waits, ``background`` without a waiting
client.
"""
