"""What `ddlab.bench` measures with: shapes, scripts, floor, tables."""
