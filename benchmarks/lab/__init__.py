"""The lab: ranks that pose as hosts, the contestants that train on them, and the report."""
