"""What `smckpt run --for NAME` replaces, a module for each framework."""
