"""The robot side: Plan format, session, emulator, policy steps. Never imports torch or the compiler."""
