print("all went well, but nobody heard a loss")
