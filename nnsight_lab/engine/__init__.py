"""Engines that stay alive across cells, and everything a caller does with one."""
