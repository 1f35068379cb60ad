"""Who may call, and how much they may send: API keys, body limits, admission."""
