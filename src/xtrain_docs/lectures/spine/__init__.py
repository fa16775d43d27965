"""The loss curves of all lectures' wrappers: what their index pages show."""
