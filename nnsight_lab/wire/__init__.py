"""What crosses a process border, and the one way it is written down.

`codec` turns a value into bytes and back, `messages` are the dataclasses that are sent. The hard
fact behind this room: what arrives was written by somebody else, a worker that ran a user's block
or a server in another building, so reading it can never run code. Nothing here is a pickle.

This file imports nothing: `codec` loads torch, `messages` and `registry` do not.
"""
