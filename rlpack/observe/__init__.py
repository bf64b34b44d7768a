"""What one sees of a run: the metric table, sinks, the console, the report and the packing picture."""
