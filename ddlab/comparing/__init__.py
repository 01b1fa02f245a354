"""Behind `ddlab.compare` and `ddlab.doctor`: calls by layers, their plain forms in float64, and verdicts."""
