"""Plans of caches in the engines that they are for, each in an environment of its own."""
