"""`hsx report`: one page on a job, for the person who decides whether to train on it.

`gather` collects the numbers (out of the ledger, which adds them up itself; of a drawn share of the stored states, in `states`;
of the disks, in `roots`) into a document; `figures` draws what is better seen than read; `page` writes both as HTML. The
document is embedded in the page, so that programs can read what people see.
"""
