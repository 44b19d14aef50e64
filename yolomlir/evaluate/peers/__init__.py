"""The engines that `yolomlir bench` times, each in a process of its own."""
