"""What each lever could save at most, before any policy of ours: `preheat headroom`."""
