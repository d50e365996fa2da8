// Makes MongoDB roles with the least rights for the processes and people of Recruiter, in the database of the job system; makes them as they
// are here if they exist. Run it again after an upgrade. It needs a user who may create roles there, for example with the role userAdmin.
//
//     mongosh "$MONGODB_URI" --file roles.js             or in an open shell: load("roles.js")
//     recruiterPrefix = "jobs_"                          before it, if the collections have a prefix (--collection-prefix):
//     mongosh "$MONGODB_URI" --eval 'recruiterPrefix = "jobs_"' --file roles.js
//
// The tables below are the only ones: a test compares them with what each program does.

var recruiterPrefix = globalThis.recruiterPrefix ?? "";

(() => {
  /** Channels of workers: `signals_0` and so on. A role names each collection. */
  const channels = [...Array(32).keys()].map((number) => `signals_${number}`);
  const schemaOf = {
    createCollection: "scheduled archived roster metadata limits groups pauses schedulers unique_periods audit signals signals_N events messages",
    createIndex: "scheduled archived roster schedulers unique_periods audit messages",
    dropIndex: "scheduled archived roster schedulers unique_periods audit messages",
    collMod: "scheduled limits groups pauses schedulers messages",
    convertToCapped: "signals signals_N events",
  };
  /** A start examines all collections: none of them may be an application's. */
  const look = {
    listCollections: "",
    find: "scheduled archived roster metadata limits groups pauses schedulers unique_periods audit signals signals_N events messages consumers payloads.files payloads.chunks",
    listIndexes: "scheduled archived roster schedulers unique_periods audit messages",
  };
  const client = {
    insert: "scheduled archived metadata unique_periods signals signals_N events messages payloads.files payloads.chunks",
    update: "scheduled metadata unique_periods",
    remove: "scheduled payloads.files payloads.chunks",
    changeStream: "messages",
    createCollection: "payloads.files payloads.chunks",
    createIndex: "payloads.files payloads.chunks",
    listIndexes: "payloads.files payloads.chunks",
  };
  /** For each role: what it is for, and for each action the collections, without the prefix. The empty name is the database itself. */
  const roles = {
    recruiterEnqueuer: ["an application: it enqueues, waits, cancels, publishes and subscribes", look, client],
    recruiterLeader: ["`recruiter run`: it assigns jobs, and makes collections, validators and indexes, also for the others", look, schemaOf, {
      insert: "scheduled archived metadata pauses signals signals_N events",
      update: "scheduled roster metadata pauses schedulers consumers",
      remove: "scheduled metadata",
      changeStream: "messages",
    }],
    recruiterWorker: ["`recruiter-worker`, and what its workables do as clients", look, client, {
      insert: "roster pauses",
      update: "roster pauses",
      remove: "roster",
    }],
    recruiterCleaner: ["`recruiter-cleaner`: it rescues the jobs of dead workers, and deletes what is old", look, {
      insert: "archived metadata pauses signals events",
      update: "scheduled roster metadata pauses",
      remove: "scheduled archived roster metadata payloads.files payloads.chunks",
    }],
    recruiterReader: ["people and monitoring: every command that only reads", look, { collStats: "events", dbStats: "" }],
    recruiterOperator: ["people: every command of `recruiter`", look, schemaOf, client, {
      insert: "limits groups pauses schedulers consumers audit",
      update: "archived roster limits groups schedulers consumers audit payloads.chunks",
      remove: "archived limits pauses schedulers consumers",
      collStats: "events",
      dbStats: "",
    }],
  };
  /** What `recruiter doctor` reads of the server: rights on the cluster exist in `admin` only. */
  const ofServer = ["recruiterServerReader", [
    { resource: { cluster: true }, actions: ["replSetGetStatus", "serverStatus"] },
    { resource: { db: "local", collection: "oplog.rs" }, actions: ["collStats"] },
  ]];

  if (!/^([A-Za-z_][A-Za-z0-9_.-]{0,63})?$/.test(recruiterPrefix) || recruiterPrefix.startsWith("system.")) {
    throw new Error(`the prefix ${JSON.stringify(recruiterPrefix)} is not valid: it must be that of --collection-prefix, for example jobs_`);
  }
  const name = db.getName();
  if (["admin", "local", "config"].includes(name)) {
    throw new Error(`\`${name}\` is not the database of a job system: name that one behind the host of the connection string`);
  }

  const named = (words) => words.split(" ").flatMap((word) => (word === "signals_N" ? channels : [word]));
  const privilegesOf = (parts) => {
    const actions = new Map();
    for (const [action, words] of parts.flatMap((part) => Object.entries(part))) {
      for (const collection of named(words)) {
        actions.set(collection, (actions.get(collection) ?? new Set()).add(action));
      }
    }
    const all = [...actions].map(([collection, granted]) => ({
      resource: { db: name, collection: collection && recruiterPrefix + collection }, actions: [...granted].sort(),
    }));
    return all.sort((one, other) => (one.resource.collection < other.resource.collection ? -1 : 1));
  };
  const isDenied = (error) => error.code === 13;
  /** Without the command, which is long. */
  const said = (error) => error.message.split(" to execute command")[0];
  /** Those privileges of some that others do not have. */
  const without = (some, others) => {
    const keyOf = ({ resource }) => JSON.stringify(Object.entries(resource).sort());
    const known = new Map(others.map((privilege) => [keyOf(privilege), privilege.actions]));
    const left = some.map((privilege) => {
      const have = known.get(keyOf(privilege)) ?? [];
      return { resource: privilege.resource, actions: privilege.actions.filter((action) => !have.includes(action)) };
    });
    return left.filter(({ actions }) => actions.length > 0);
  };

  /**
   * Creates or changes a role, and says which. What is missing is granted before anything is revoked: processes may run. `updateRole` would need
   * a right on all databases.
   */
  const make = (on, role, privileges) => {
    const writeConcern = { w: "majority" };
    const [found] = on.runCommand({ rolesInfo: { role, db: on.getName() }, showPrivileges: true }).roles;
    if (!found) {
      on.runCommand({ createRole: role, privileges, roles: [], writeConcern });
      return "made";
    }
    const [missing, excess] = [without(privileges, found.privileges), without(found.privileges, privileges)];
    if (missing.length === 0 && excess.length === 0 && found.roles.length === 0) return "was already as it should be";
    if (missing.length > 0) on.runCommand({ grantPrivilegesToRole: role, privileges: missing, writeConcern });
    if (excess.length > 0) on.runCommand({ revokePrivilegesFromRole: role, privileges: excess, writeConcern });
    if (found.roles.length > 0) on.runCommand({ revokeRolesFromRole: role, roles: found.roles, writeConcern });
    return "was there with other rights, and is changed";
  };

  const made = Object.entries(roles).map(([role, [purpose, ...parts]]) => {
    try {
      return [recruiterPrefix + role, purpose, make(db, recruiterPrefix + role, privilegesOf(parts))];
    } catch (error) {
      if (!isDenied(error)) throw error;
      throw new Error(
        `this MongoDB user may not create or change the role ${recruiterPrefix + role} in the database \`${name}\`, so nothing further was made: run ` +
        `the script as a user with the role userAdmin on \`${name}\`, or userAdminAnyDatabase (MongoDB says: ${said(error)})`,
      );
    }
  });
  print(`Roles in the database \`${name}\`, for its collections${recruiterPrefix && ` that begin with ${recruiterPrefix}`}:`);
  made.forEach(([role, purpose, what]) => print(`- ${role} ${what}. It is for ${purpose}.`));

  const [serverReader, ofCluster] = ofServer;
  let mayServer = true;
  try {
    const what = make(db.getSiblingDB("admin"), serverReader, ofCluster);
    print(`- ${serverReader} in the database \`admin\` ${what}. With it, \`recruiter doctor\` examines the replica set and the oplog as well.`);
  } catch (error) {
    if (!isDenied(error)) throw error;
    mayServer = false;
    print(`- ${serverReader} in the database \`admin\` was not made, because this user may not create roles there. Everything works without it, ` +
      "but `recruiter doctor` cannot examine the replica set and the oplog.");
  }

  const user = (user, ...granted) => {
    const list = granted.map((role) => (role === serverReader ? `{ role: "${role}", db: "admin" }` : JSON.stringify(recruiterPrefix + role)));
    print(`    db.createUser({ user: "${recruiterPrefix}${user}", pwd: passwordPrompt(), roles: [${list.join(", ")}] })`);
  };
  const withServer = mayServer ? [serverReader] : [];
  print(`What to do next: make users in \`${name}\`, and put each into the MONGODB_URI of its process, with authSource=${encodeURIComponent(name)}.`);
  user("app", "recruiterEnqueuer");
  user("leader", "recruiterLeader");
  user("workers", "recruiterWorker", "recruiterCleaner");
  user("monitoring", "recruiterReader", ...withServer);
  user("operator", "recruiterOperator", ...withServer);
  print("Workers and cleaners share a user, because MongoDB lets a user end its own transactions only: a cleaner ends those of dead workers. " +
    "Start `recruiter run` before the others: it makes the collections.");
})();
