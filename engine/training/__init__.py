"""The tool that makes better drafts, and the bundled pair."""
