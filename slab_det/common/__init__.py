"""What every part uses: errors, records, batches of images, modes of models, memory. It imports no other part."""
