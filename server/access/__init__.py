"""Access control: API keys, body limits, admission and quotas."""
