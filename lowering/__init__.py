"""The IR (types, ops, text form, verifier, interpreter) and the front ends that produce it."""
