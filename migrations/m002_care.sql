-- When a snapshot was last read whole and found to be as it was written.
alter table snapshots add column verified_ns integer;

-- Bytes of snapshot files written on each day, counted in days since 1970 (UTC).
create table writes (
    day integer primary key,
    nbytes integer not null check (nbytes >= 0)
) strict;

-- Prefixes that were inserted but not yet admitted to disk.
create table sightings (
    digest blob primary key check (length(digest) = 16),
    seen_ns integer not null
) strict, without rowid;

create index sightings_by_age on sightings (seen_ns);
