"""The driver that serves: sockets, tasks, cancellation, time. It decides nothing."""
