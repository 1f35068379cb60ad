"""The dashboard: what the engine is doing now, and why a request was slow.

    browser ── GET /dashboard ───────► one HTML file, the same for all (page.py)
            ── GET /dashboard/state ─► Looker ── at most five looks a second ──► engine

The page polls only while it is visible, and the engine records its steps only while it is polled.
"""
