"""The same random weights in the formats that peers load."""
