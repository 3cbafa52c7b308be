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

-- Snapshots that were removed of late. Until its file is gone as well, such a file must
-- not be taken for one that the index has lost.
create table removed (
    id integer primary key,
    name text not null unique
) strict;

create trigger snapshots_are_removed after delete on snapshots begin
    insert or ignore into removed (name) values (old.name);
    delete from removed where id <= (select max(id) from removed) - 10000;
end;
