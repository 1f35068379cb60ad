"""Anthropic's Messages API, on top of the conversations of chat.

body ─► inputs ─► translate ─► ChatRequest ─► Conversation ─► parts ─► call ─► blocks, events
"""
