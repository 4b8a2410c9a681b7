"""The hook into Keras: resume `fit`, report its epochs, checkpoint its state."""
