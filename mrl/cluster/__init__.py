"""Ray: placement, actor groups, supervision. The only folder that imports ray."""
