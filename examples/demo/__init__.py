"""The main job, end to end: pods through a real CNI chain, captured, proved by connections."""
