"""Many trials: what is recorded is skipped, the rest goes to an engine (this machine, Ray), searches choose."""
