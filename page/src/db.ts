/** The browser's own store: conversations and images never leave it unless they are sent or exported. */

const STORES = ["conversations", "images"] as const;
export type StoreName = (typeof STORES)[number];

let opened: Promise<IDBDatabase> | undefined;

function open(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("weft", 1);
    asked.onupgradeneeded = () => {
      for (const name of STORES) asked.result.createObjectStore(name, { keyPath: "id" });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function run<T>(name: StoreName, mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>) {
  const base = await open();
  return new Promise<T>((resolve, reject) => {
    const asked = work(base.transaction(name, mode).objectStore(name));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

export const all = <T>(name: StoreName) => run<T[]>(name, "readonly", (store) => store.getAll());
export const get = (name: StoreName, id: string) => run<unknown>(name, "readonly", (store) => store.get(id));
export const put = (name: StoreName, value: unknown) => run(name, "readwrite", (store) => store.put(value));
export const remove = (name: StoreName, id: string) => run(name, "readwrite", (store) => store.delete(id));
export const clear = (name: StoreName) => run(name, "readwrite", (store) => store.clear());
