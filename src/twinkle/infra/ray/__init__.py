"""The mode ``ray``: groups of devices as workers elsewhere. Nothing outside of this folder imports Ray.

cluster    connects or starts Ray, and makes workers for groups
placement  which groups get which devices of which nodes
worker     what runs in each worker
component  the script's end of an object that workers hold
calls      a call on its way: spread, watched, collected
"""
