"""One module for each resource: parse, call one verb, answer."""
